"""The rules behind the offline model: `language` reads text, `slots` fills schemas from it, `dialogue` decides."""
