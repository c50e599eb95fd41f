"""Look at what a training gives as its state, and notice what is likely a mistake."""
