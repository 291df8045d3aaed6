import sys
from tests.crowd import Crowd
from tests.habits.harness import run_topic
if __name__ == "__main__":
    count, *plans = sys.argv[1:]
    crowd = Crowd(int(count))
    for plan in plans:
        print("=====", plan)
        for line in crowd.run(run_topic, "crossing", plan)[0]:
            print("-", line[:420].replace("\n"," ") if "raised" not in line else line[-500:])
    crowd.close()
