def minutes(text):
    hours, rest = text.split(":")
    return int(hours) * 100 + int(rest)
