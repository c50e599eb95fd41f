"""Plan which rank writes which part of which tensor, each element once."""
