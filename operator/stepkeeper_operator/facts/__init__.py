"""Read objects of the API server into small frozen values that hold only what the operator uses."""
