"""The files of a save, without torch: this package and what it imports start in milliseconds, and
so do the processes that tests kill in the midst of a write.
"""
