"""Define the custom resources as types. The CRDs are generated from them."""
