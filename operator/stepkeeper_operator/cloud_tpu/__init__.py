"""Talk to the Cloud TPU API.

Only `authorization`, `client`, `convert` and `errors` import google's packages, and only where the kind is on.
"""
