"""Rendered pictures with their texts: lines, invoices, tables, charts and shapes."""
