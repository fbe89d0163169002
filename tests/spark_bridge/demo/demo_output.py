"""What ``statestore demo`` says in the end, if all is right."""

ALL_RIGHT = "The state of all 4,044 aircraft (336,776 flights) is what pandas computes"
