"""`onebox report`: results as one HTML page and as Markdown, every figure with the file and key it was read from."""

from onebox.report.make import RenderedReport, make_report
from onebox.report.source import ResultFile, load

__all__ = ["RenderedReport", "ResultFile", "load", "make_report"]
