"""What launchers share: argument checks and the device that a kernel runs on."""
