"""Define version v1alpha1 of the API group stepkeeper.dev."""
