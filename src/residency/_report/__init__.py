"""Shows what a run recorded: tables, a page with a timeline, and files for other viewers."""
