"""`onebox report`: results as one HTML page and as Markdown, every figure with the file and key it was read from."""

from onebox.report.make import Report, make_report
from onebox.report.source import Source, load

__all__ = ["Report", "Source", "load", "make_report"]
