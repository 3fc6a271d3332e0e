"""Where prices come from: kernel tables, data sheets (roofline), measurement."""
