"""The modules that stand in the place of ``torch.cuda`` and its classes."""
