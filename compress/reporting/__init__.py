"""What was measured: the rows of the comparison, how training went, and with what; as a table, JSON or a page."""

from compress.records.run_report import Latency, Report, Row

__all__ = ["Latency", "Report", "Row"]
