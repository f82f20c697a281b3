"""The search for a student: shapes proposed, rejected, scored, trained and measured
under a budget."""
