def minutes(hours):
    return hours * 24
