"""What others are told of the locks of this process: `events`, and who hears of them (`observers`)."""
