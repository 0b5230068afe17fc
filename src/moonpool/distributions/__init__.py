"""Quantiles and histograms, for everything that decides, measures or prints."""
