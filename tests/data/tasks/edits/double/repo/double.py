def double(number):
    return number * 3
