"""What others are told of the locks of this process: `events`, who hears of them (`observers`), and the `history`."""
