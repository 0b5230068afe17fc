"""Instances of several processes: pipeline stages (stage_*) and tensor ranks (tensor_*)."""
