"""Score the answers of `mesh-transformer answers`: pass@k by a check, or win rates by a judge.

`--check FILE.py:FUNCTION` names a function (prompt, answer, row) that returns True or 1 if the
answer is right, else less.  `--against OTHER` compares with other answers to the same prompts; a
model at `--url` judges them.
"""

import json

from mesh_transformer.cli.answers import add_server_arguments, options_of
from mesh_transformer.cli.arguments import Parser, positive
from mesh_transformer.util import InputError


def main() -> None:
    parser = Parser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("answers", help="file that the command answers has written")
    parser.add_argument("--check", metavar="FILE.py:FUNCTION", help="function that checks answers")
    parser.add_argument(
        "--k", type=positive, nargs="+", default=[1], help="values of k (default 1)"
    )
    parser.add_argument("--against", metavar="FILE", help="other answers to the same prompts")
    parser.add_argument("--judgements", metavar="FILE", help="file for a judge's judgements")
    parser.add_argument("--judge-prompt", metavar="FILE", help="question to the judge, a text with "
                        "{prompt}, {first} and {second}")  # fmt: skip
    add_server_arguments(parser, "--against")
    parser.add_argument("--output", metavar="FILE", help="file for the results, as JSON")
    args = parser.parse_args()
    if (args.check is None) == (args.against is None):
        raise InputError("give --check or --against")
    if args.against and not (args.url and args.judgements):
        raise InputError("--against requires --url and --judgements; add them")

    from mesh_transformer.data.chat import text_in
    from mesh_transformer.evaluation import answers
    from mesh_transformer.evaluation.openai_client import Client
    from mesh_transformer.storage import files

    if args.check:
        rows = answers.read_answers(args.answers)
        results = answers.pass_rates(rows, answers.checked(args.check, rows), args.k)
    else:
        template = answers.JUDGE
        if args.judge_prompt:
            template = text_in(args.judge_prompt, "--judge-prompt")
        results = answers.win_rate(
            args.answers,
            args.against,
            args.judgements,
            Client(args.url, args.name),
            options_of(args),
            template,
            in_flight=args.in_flight,
        )
    for name, value in results.items():
        if isinstance(value, dict):
            low, high = value["interval"]
            value = f"{value['mean']:.4f} (95 % interval {low:.4f} to {high:.4f})"
        print(f"{name}: {value}")
    if args.output:
        files.write_text(args.output, json.dumps(results, indent=2) + "\n")
