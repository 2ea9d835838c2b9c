import unittest

from colour import colour


class TestColour(unittest.TestCase):
    def test_colour(self):
        self.assertEqual(colour("grass"), "green")
