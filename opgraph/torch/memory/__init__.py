"""What is kept for backward and the peak: measured, told and drawn."""
