"""Facts: model shapes, tensor names, format sizes, hardware peaks, errors. Imports the standard library alone."""
