def smallest(values):
    return sorted(values)[1]
