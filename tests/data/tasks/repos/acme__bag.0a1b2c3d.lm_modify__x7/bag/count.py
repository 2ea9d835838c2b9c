def most(words):
    best = ""
    for word in words:
        if words.count(word) > words.count(best):
            best = word
    return best
