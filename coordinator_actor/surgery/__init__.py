"""Changes what is stored of a query by hand: files of kept versions are written anew, as when keys are forgotten."""
