"""Schemas of the files under results/, by kind of job. Writers construct these models, readers parse them."""
