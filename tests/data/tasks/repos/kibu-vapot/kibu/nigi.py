from kibu.vapot import zugun

def suri(pit, bil):
    return {"guvon": zugun(pit, bil)}
