import unittest

from greeting import greeting


class TestGreeting(unittest.TestCase):
    def test_greeting(self):
        self.assertEqual(greeting("Ann"), "Hello Ann")
