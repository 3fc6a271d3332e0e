"""Sources of prices: kernel tables, data sheets (roofline), measurement."""
