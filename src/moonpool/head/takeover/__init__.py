"""A standby replaces a head that is gone."""
