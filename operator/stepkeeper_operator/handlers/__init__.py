"""Connect the operator to kopf. No other room knows kopf."""
