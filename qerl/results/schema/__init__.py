"""What the files under results/ hold, a module a kind of job; writers construct these models and readers parse them."""
