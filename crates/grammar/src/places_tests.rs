//! Grammars over a vocabulary of bytes: what may come next, step by step and all at once.

use serving_core::ids::PrefixSalt;

use super::*;
use crate::Vocabulary;

const END: TokenId = TokenId(256);
/// A token of several bytes: `{"a`.
const LONG: TokenId = TokenId(257);
const SIZE: u32 = 258;

fn bytes(token: TokenId) -> Option<(&'static [u8], bool)> {
    static BYTES: [u8; 256] = {
        let mut all = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            all[byte] = byte as u8;
            byte += 1;
        }
        all
    };
    match token {
        END => Some((b"<end>", true)),
        LONG => Some((b"{\"a", false)),
        TokenId(byte) => Some((BYTES.get(byte as usize..=byte as usize)?, false)),
    }
}

fn places() -> Places {
    let grammars = Grammars::new(|| Vocabulary::new(SIZE, &[END], bytes));
    Places::new(Arc::new(grammars), SIZE, 4)
}

fn sequence(request: u128) -> (AttemptKey, ChoiceIndex) {
    let key = AttemptKey {
        request: RequestId(request),
        attempt: Attempt(0),
    };
    (key, ChoiceIndex(0))
}

fn follows(grammar: OutputGrammar) -> OutputConstraint {
    OutputConstraint {
        grammar: Some(grammar),
        ..OutputConstraint::default()
    }
}

fn schema(text: &str) -> OutputConstraint {
    follows(OutputGrammar::JsonSchema(text.into()))
}

fn tokens(text: &str) -> Vec<TokenId> {
    text.bytes().map(|byte| TokenId(byte.into())).collect()
}

/// The allowed tokens, as characters, `E` for the end and `L` for the long one.
fn set(words: &[u32]) -> String {
    let is_allowed = |token: &u32| words[(token / 32) as usize] & (1 << (token % 32)) != 0;
    let show = |token| match TokenId(token) {
        END => 'E',
        LONG => 'L',
        _ => char::from(token as u8),
    };
    (0..SIZE).filter(is_allowed).map(show).collect()
}

/// Places in which the constraint can be followed.
fn places_for(constraint: &OutputConstraint) -> Places {
    let places = places();
    if let Some(grammar) = &constraint.grammar {
        places.grammars.compile(grammar).expect("it compiles");
    }
    places
}

fn after(constraint: &OutputConstraint, outputs: &str) -> String {
    let mut places = places_for(constraint);
    let allowed = places.allowed(sequence(1), constraint, &tokens(outputs));
    set(allowed.expect("it can be followed"))
}

#[test]
fn a_schema_allows_what_can_still_become_such_json() {
    let object = schema(
        r#"{"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"], "additionalProperties": false}"#,
    );
    assert_eq!(after(&object, ""), "{L");
    assert_eq!(after(&object, "{"), "\"");
    assert_eq!(after(&object, "{\"a\":"), " 12");
    assert_eq!(after(&object, "{\"a\": 2"), "3");
    assert_eq!(after(&object, "{\"a\": 23"), "}");
    assert_eq!(after(&object, "{\"a\": 23}"), "E");
}

#[test]
fn a_regular_expression_and_rules_are_followed() {
    let regex = follows(OutputGrammar::Regex("ab?".into()));
    assert_eq!(after(&regex, ""), "a");
    assert_eq!(after(&regex, "a"), "bE");
    let lark = follows(OutputGrammar::Lark("start: \"yes\" | \"no\"".into()));
    assert_eq!(after(&lark, ""), "ny");
    assert_eq!(after(&lark, "y"), "e");
}

#[test]
fn token_by_token_and_from_the_first_one_give_the_same() {
    let object =
        schema(r#"{"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}"#);
    let outputs = tokens("{\"a\": \"xy\"");
    let mut followed = places_for(&object);
    for taken in 0..=outputs.len() {
        let step_by_step = followed
            .allowed(sequence(1), &object, &outputs[..taken])
            .unwrap()
            .to_vec();
        let at_once = places_for(&object)
            .allowed(sequence(1), &object, &outputs[..taken])
            .unwrap()
            .to_vec();
        assert_eq!(step_by_step, at_once, "after {taken} tokens");
    }
}

/// Walks through a grammar at random, greedily for long, and asks for some tokens alone before each step.
fn walk_asking(constraint: &OutputConstraint, seed: u64) -> (u32, u32) {
    let (mut asked, mut whole) = (places_for(constraint), places_for(constraint));
    let mut random = seed;
    let mut next = |below: usize| {
        // Knuth's multiplier of a linear congruential generator, of which the upper bits are good.
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as usize % below
    };
    let (mut outputs, mut told, mut untold) = (Vec::new(), 0, 0);
    for _ in 0..120 {
        let words = whole.allowed(sequence(1), constraint, &outputs).unwrap().to_vec();
        let allowed: Vec<u32> = (0..SIZE)
            .filter(|token| words[(token / 32) as usize] & (1 << (token % 32)) != 0)
            .collect();
        let drawn = TokenId(allowed[next(allowed.len())]);
        let others = [next(SIZE as usize + 2), next(128)].map(|token| TokenId(token as u32));
        for token in others.into_iter().chain([drawn]) {
            match asked.allows(sequence(1), constraint, (&outputs, token)) {
                Some(allows) => {
                    assert_eq!(allows, allowed.contains(&token.0), "{token:?} after {outputs:?}");
                    told += 1;
                }
                None => {
                    let all = asked.allowed(sequence(1), constraint, &outputs).unwrap();
                    assert_eq!(all, words, "after {outputs:?}");
                    untold += 1;
                }
            }
        }
        if drawn == END {
            break;
        }
        outputs.push(drawn);
    }
    (told, untold)
}

#[test]
fn rows_of_a_model_beyond_its_vocabulary_are_refused_and_lose_nothing() {
    let word = follows(OutputGrammar::Regex("[a-c]{3}".into()));
    let grammars = Grammars::new(|| Vocabulary::new(SIZE, &[END], bytes));
    grammars
        .compile(word.grammar.as_ref().expect("one"))
        .expect("it compiles");
    let mut places = Places::new(Arc::new(grammars), SIZE + 40, 4);
    let outputs = tokens("a");
    assert_eq!(
        places.allows(sequence(1), &word, (&outputs, TokenId(SIZE + 20))),
        Some(false)
    );
    assert_eq!(
        places.allows(sequence(1), &word, (&outputs, tokens("b")[0])),
        Some(true)
    );
    assert_eq!(
        places.allows(sequence(1), &word, (&outputs, tokens("d")[0])),
        Some(false)
    );
}

#[test]
fn a_token_that_is_asked_for_alone_is_allowed_when_the_mask_has_it() {
    let mut with_words = schema(r#"{"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 8}"#);
    with_words.bad_words = vec![tokens("a"), tokens("b\"")];
    let mut with_list = follows(OutputGrammar::Regex("[a-z]{40}(yes|no)?".into()));
    with_list.allowed_tokens = [tokens("aeiouyns"), vec![END]].concat();
    let constraints = [
        with_words,
        with_list,
        schema(
            r#"{"type": "object", "properties": {"a": {"enum": ["x", "xyz"]}, "b": {"type": "number"}}, "required": ["a", "b"]}"#,
        ),
        schema(
            r#"{"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^a{3,9}$"}]}}}"#,
        ),
        follows(OutputGrammar::Lark("start: \"yes\" start | \"no\"".into())),
    ];
    for (index, constraint) in constraints.iter().enumerate() {
        let (told, untold) = (0..6)
            .map(|seed| walk_asking(constraint, seed))
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert!(told > 3 * untold, "constraint {index}: {told} told, {untold} not");
    }
}

/// As in files of Gemma whose converter took `<end_of_turn>` for a word.
#[test]
fn an_end_token_that_is_called_a_word_is_drawn_only_where_the_output_may_end() {
    fn with_end_as_word(token: TokenId) -> Option<(&'static [u8], bool)> {
        match token {
            END => Some((b"<end>", false)),
            other => bytes(other),
        }
    }
    let grammars = Grammars::new(|| Vocabulary::new(SIZE, &[END], with_end_as_word));
    let text = follows(OutputGrammar::Regex("[a-z<>]+!".into()));
    let grammar = text.grammar.as_ref().expect("one");
    grammars.compile(grammar).expect("it compiles");
    let mut places = Places::new(Arc::new(grammars), SIZE, 4);
    let inside = places.allowed(sequence(1), &text, &tokens("a"));
    let inside = set(inside.expect("it is followed"));
    assert!(inside.contains('<') && !inside.contains('E'), "{inside}");
    assert_eq!(places.allows(sequence(1), &text, (&tokens("a"), END)), Some(false));
    let at_end = places.allowed(sequence(1), &text, &tokens("a!"));
    assert_eq!(set(at_end.expect("it is followed")), "E");
}

#[test]
fn a_vocabulary_may_have_tokens_that_are_too_long_for_the_parser() {
    static LETTERS: [u8; 5_000] = [b'a'; 5_000];
    for (length, expected) in [(1_024, "aL"), (1_025, "a"), (5_000, "a")] {
        let with_long = move |token: TokenId| match token {
            LONG => Some((&LETTERS[..length], false)),
            other => bytes(other),
        };
        let grammars = Grammars::new(move || Vocabulary::new(SIZE, &[END], with_long));
        let text = follows(OutputGrammar::Regex("a+".into()));
        let grammar = text.grammar.as_ref().expect("one");
        grammars.compile(grammar).expect("it compiles");
        let mut places = Places::new(Arc::new(grammars), SIZE, 1);
        let allowed = places.allowed(sequence(1), &text, &[]);
        assert_eq!(set(allowed.expect("it is followed")), expected, "{length}");
    }
}

#[test]
fn more_sequences_than_places_cost_time_only() {
    let word = follows(OutputGrammar::Regex("[a-c]{3}".into()));
    let mut places = places_for(&word);
    for taken in 0..3 {
        for request in 0..10 {
            let allowed = places
                .allowed(sequence(request), &word, &tokens("abc")[..taken])
                .unwrap();
            assert_eq!(set(allowed), "abc");
        }
    }
}

#[test]
fn a_request_that_has_ended_leaves_no_place() {
    let word = follows(OutputGrammar::Regex("[a-c]{3}".into()));
    let mut places = places_for(&word);
    let (ended, other) = (sequence(1), sequence(2));
    for one in [ended, (ended.0, ChoiceIndex(1)), other] {
        places.allowed(one, &word, &[]).unwrap();
    }
    places.forget(ended.0);
    assert!(places.places.get(&ended).is_none() && places.places.get(&(ended.0, ChoiceIndex(1))).is_none());
    assert!(places.places.get(&other).is_some());
}

#[test]
fn allowed_tokens_and_bad_words_hold_alone_and_together_with_a_grammar() {
    let mut constraint = OutputConstraint {
        grammar: None,
        allowed_tokens: tokens("abc"),
        bad_words: vec![tokens("ab"), tokens("c")],
    };
    assert_eq!(after(&constraint, ""), "ab");
    assert_eq!(after(&constraint, "xa"), "a");
    constraint.grammar = Some(OutputGrammar::Regex("[b-z]+".into()));
    assert_eq!(after(&constraint, ""), "b");
}

#[test]
fn what_is_no_grammar_is_refused_and_says_why() {
    let grammars = Grammars::new(|| Vocabulary::new(SIZE, &[END], bytes));
    for wrong in [
        OutputGrammar::JsonSchema("{".into()),
        OutputGrammar::JsonSchema("[]".into()),
        OutputGrammar::JsonSchema(r#"{"type": "no such type"}"#.into()),
        OutputGrammar::Regex("(".into()),
        OutputGrammar::Lark("start: missing".into()),
        OutputGrammar::JsonSchema(r##"{"$ref": "#/$defs/missing"}"##.into()),
        OutputGrammar::JsonSchema(format!(r#"{{"anyOf": [{{"pattern": "{}"}}]}}"#, "a".repeat(9_000)).into()),
        OutputGrammar::JsonSchema(format!(r#"{{"patternProperties": {{"{}": {{}}}}}}"#, "a".repeat(9_000)).into()),
    ] {
        let refused = grammars.compile(&wrong);
        assert!(
            matches!(&refused, Err(GrammarError::Invalid(why)) if !why.is_empty()),
            "{wrong:?}: {refused:?}"
        );
    }
    let unknown = Grammars::unknown().compile(&OutputGrammar::Regex("a".into()));
    assert!(matches!(unknown, Err(GrammarError::NoVocabulary(_))), "{unknown:?}");
}

#[test]
fn outputs_that_the_grammar_does_not_allow_are_an_error() {
    let word = follows(OutputGrammar::Regex("ab".into()));
    let mut places = places_for(&word);
    let lost = places.allowed(sequence(1), &word, &tokens("x"));
    assert!(matches!(lost, Err(GrammarError::Lost(_))), "{lost:?}");
}

#[test]
fn a_grammar_is_found_while_somebody_keeps_it_and_never_compiled_by_a_step() {
    let mut places = places();
    let word = follows(OutputGrammar::Regex("ab".into()));
    let lost = places.allowed(sequence(1), &word, &[]);
    assert!(matches!(lost, Err(GrammarError::Lost(_))), "{lost:?}");
    let grammar = |number: u32| OutputGrammar::Regex(format!("a{{{number}}}").into());
    let first = places.grammars.compile(&grammar(1)).unwrap();
    for number in 2..40 {
        places.grammars.compile(&grammar(number)).unwrap();
    }
    assert!(places.grammars.find(&grammar(1)).is_some() && places.grammars.find(&grammar(2)).is_none());
    drop(first);
    assert!(places.grammars.find(&grammar(1)).is_none());
}

#[test]
fn a_tenant_finds_no_grammar_that_another_has_compiled_and_follows_its_own_when_the_others_is_gone() {
    let mut places = places();
    let word = follows(OutputGrammar::Regex("ab".into()));
    let grammar = word.grammar.as_ref().unwrap();
    let [one, other] = [1, 2].map(|salt| Some(PrefixSalt(salt)));
    let compile =
        |places: &Places, whose, grammar: &OutputGrammar| places.grammars.compile_for(whose, grammar).unwrap();
    let ones = compile(&places, one, grammar);
    let others = compile(&places, other, grammar);
    let everybodys = compile(&places, None, grammar);
    assert!(Arc::ptr_eq(&ones, &compile(&places, one, grammar)));
    assert!(!Arc::ptr_eq(&ones, &others) && !Arc::ptr_eq(&ones, &everybodys));
    // All owners together keep as many as one.
    for number in 1..40 {
        compile(&places, other, &OutputGrammar::Regex(format!("c{{{number}}}").into()));
    }
    let (gone, gone_too) = (Arc::downgrade(&others), Arc::downgrade(&everybodys));
    drop((others, everybodys));
    assert_eq!((gone.strong_count(), gone_too.strong_count()), (0, 0));
    assert!(Arc::ptr_eq(&ones, &compile(&places, one, grammar)));
    let allowed = places.allowed(sequence(1), &word, &[]);
    assert_eq!(set(allowed.expect("it can be followed")), "a");
}

#[test]
fn deep_grammars_are_refused_or_compiled_and_break_nothing() {
    let grammars = Grammars::new(|| Vocabulary::new(SIZE, &[END], bytes));
    let chain: Vec<String> = (0..4_000)
        .map(|n| format!("\"a{n}\":{{\"$ref\":\"#/$defs/a{}\"}}", n + 1))
        .collect();
    let references = format!(
        "{{\"$ref\":\"#/$defs/a0\",\"$defs\":{{{},\"a4000\":{{\"type\":\"null\"}}}}}}",
        chain.join(",")
    );
    let rules: String = (0..5_000).map(|n| format!("a{n}: a{}\n", n + 1)).collect();
    for deep in [
        OutputGrammar::JsonSchema(references.into()),
        OutputGrammar::Lark(format!("start: a0\n{rules}a5000: \"x\"").into()),
        OutputGrammar::Lark(format!("start: \"a\" %if {}x{}", "not(".repeat(15_000), ")".repeat(15_000)).into()),
        OutputGrammar::Regex(format!("{}a{}", "(".repeat(2_000), ")".repeat(2_000)).into()),
    ] {
        let compiled = grammars.compile(&deep);
        assert!(
            matches!(compiled, Ok(_) | Err(GrammarError::Invalid(_))),
            "{compiled:?}"
        );
    }
}

#[test]
fn a_long_output_is_followed_again_at_once() {
    let text = schema(r#"{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}"#);
    let outputs = format!("{{\"a\": \"{}", "x".repeat(3_000));
    assert!(after(&text, &outputs).contains('x'));
}

/// Fifteen endings, each at another distance from some `a` before it. So every token leads to expressions that the parser has not met,
/// and it keeps a limited number of them.
fn costly() -> OutputConstraint {
    let ending = |nth: u8| format!("[ab]*a[ab]{{{}}}{}", 60 + 7 * u32::from(nth), char::from(b'c' + nth));
    let endings: Vec<String> = (0..15).map(ending).collect();
    follows(OutputGrammar::Regex(endings.join("|").into()))
}

#[test]
fn what_questions_have_used_up_is_no_loss_for_the_outputs() {
    let grammar = costly();
    let outputs = tokens(&"aaaaaaabbbbbb".repeat(4)[..43]);
    let mut asked = places_for(&grammar);
    for taken in 0..outputs.len() {
        for token in tokens("abc") {
            if asked
                .allows(sequence(1), &grammar, (&outputs[..taken], token))
                .is_none()
            {
                asked.allowed(sequence(1), &grammar, &outputs[..taken]).unwrap();
            }
        }
    }
    let place = asked.places.get(&sequence(1)).unwrap();
    let mut used_up = Place {
        matcher: place.matcher.deep_clone(),
        ..*place
    };
    assert!(
        used_up.follow(&outputs).is_err(),
        "the questions cost too little for this test"
    );
    let after_questions = asked.allowed(sequence(1), &grammar, &outputs).map(set);
    let without = places_for(&grammar).allowed(sequence(1), &grammar, &outputs).map(set);
    assert_eq!(
        (after_questions.unwrap(), without.unwrap()),
        ("ab".to_owned(), "ab".to_owned())
    );
}
