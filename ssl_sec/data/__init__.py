"""Sources open image sets; samplers choose the images of each step; loading brings them to the device."""
