"""What each rule of the workflow is to do: one model a kind of job, which `plan` makes and `qerl rule` parses."""
