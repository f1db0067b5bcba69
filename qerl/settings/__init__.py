"""Every key of every configuration: pydantic models, one module a theme, and the errors that name a key."""
