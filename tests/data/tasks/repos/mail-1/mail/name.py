def user(address):
    parts = address.split("@")
    return parts[1]
