PANELS = ("Data", "Training", "Budget", "Device", "Search", "Output")
"""The groups of options in the help."""
