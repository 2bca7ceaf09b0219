"""Calibrated quantisation: rounds a model's matrices so that its blocks give what they gave before, on given text."""
