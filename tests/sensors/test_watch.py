"""The sensors are read by a thread, now and then, and only while somebody asks."""

import threading
import time

from onebox.sensors import SensorReading, SensorWatch


def test_many_questions_are_few_readings_in_another_thread():
    threads = []

    def read():
        threads.append(threading.current_thread())
        return SensorReading(time.perf_counter(), {"box": 20.0 + len(threads)})

    watch = SensorWatch(read, interval_s=30.0)
    assert [watch.latest().box_w for _ in range(50)] == [21.0] * 50
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_an_old_reading_is_none():
    watch = SensorWatch(lambda: SensorReading(time.perf_counter() - 3600), interval_s=30.0)
    assert watch.latest() is None


def test_sensors_that_hang_do_not_hold_up_the_answer_for_long():
    release = threading.Event()

    def read():
        release.wait(30)
        return SensorReading(time.perf_counter())

    began_at = time.monotonic()
    assert SensorWatch(read).latest() is None
    release.set()
    assert time.monotonic() - began_at < 20
