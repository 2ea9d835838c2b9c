def greeting(name):
    return "Helo " + name
