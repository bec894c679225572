"""Parts for other frameworks, one module each; a framework is imported when its part is used."""
