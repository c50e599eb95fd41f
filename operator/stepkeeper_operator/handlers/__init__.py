"""Connect the operator to kopf. No other package imports kopf."""
