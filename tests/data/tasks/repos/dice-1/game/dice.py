def score(rolls):
    points = 0
    for roll in rolls[1:]:
        points += roll
    return points
