"""Pages and tables of the records: runs, choices among bundles, searches,
measurements."""
