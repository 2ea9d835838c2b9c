def first(slug):
    parts = slug.split("-")
    if len(parts) > 1:
        return parts[1]
    return slug
