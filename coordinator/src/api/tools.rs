//! `tools` and `tool_choice`: which functions the model may call, and which it must.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use serving_core::request::OutputGrammar;

use super::constraint::Schema;
use super::error::{ApiError, short};
use super::forms::{Given, List};
use super::json_tree::{TooManyValues, Trees};
use super::limits::{TOOL_NAME_CHARS_MAX, TOOL_VALUES_MAX, TOOLS_MAX};

/// Calls that one answer may have when it must have some. A small model would go on until its budget is used up.
const REQUIRED_CALLS_MAX: usize = 4;
/// The schema of a function that has none, or an empty one.
const NO_PARAMETERS: &str = r#"{"type":"object","properties":{}}"#;

#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `type` and `function`")]
pub struct Tool {
    r#type: Option<String>,
    function: Option<Function>,
    /// In a response the fields of the function stand beside the type.
    #[serde(skip)]
    flat: Option<Function>,
}

/// A tool of `/v1/responses`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `type` and `name`")]
pub struct FlatTool {
    r#type: Option<String>,
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Schema>,
}

impl From<FlatTool> for Tool {
    fn from(tool: FlatTool) -> Self {
        Self {
            r#type: tool.r#type,
            function: None,
            flat: Some(Function {
                name: tool.name,
                description: tool.description,
                parameters: tool.parameters,
            }),
        }
    }
}

/// `strict` changes nothing: a call that is forced always follows its schema.
#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `name`")]
struct Function {
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Schema>,
}

pub type Tools = List<Tool, TOOLS_MAX>;

/// Which calls an answer has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    None,
    #[default]
    Auto,
    Required,
    Named(String),
}

impl<'de> Deserialize<'de> for ToolChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Object {
            function: Named,
        }
        #[derive(Deserialize)]
        struct Named {
            name: String,
        }
        let wanted = "none, auto, required, or {\"type\": \"function\", \"function\": {\"name\": ..}}";
        match Written::<Object>::read(deserializer, wanted)? {
            Written::Object(object) => Ok(Self::Named(object.function.name)),
            Written::Word(word) => Self::of_word(word, wanted),
        }
    }
}

impl ToolChoice {
    fn of_word<E: serde::de::Error>(word: String, wanted: &str) -> Result<Self, E> {
        match word.as_str() {
            "none" => Ok(Self::None),
            "auto" => Ok(Self::Auto),
            "required" => Ok(Self::Required),
            _ => Err(Given::<serde::de::IgnoredAny>::Text(word).is_not(&wanted)),
        }
    }
}

/// The choice in `/v1/responses`, where a function's name stands beside the type.
#[derive(Debug, Default)]
pub struct FlatToolChoice(pub ToolChoice);

impl<'de> Deserialize<'de> for FlatToolChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Object {
            r#type: String,
            name: String,
        }
        let wanted = "none, auto, required, or {\"type\": \"function\", \"name\": ..}";
        match Written::<Object>::read(deserializer, wanted)? {
            Written::Object(object) if object.r#type == "function" => Ok(Self(ToolChoice::Named(object.name))),
            Written::Object(_) => Err(D::Error::custom(format!("must be {wanted}"))),
            Written::Word(word) => ToolChoice::of_word(word, wanted).map(Self),
        }
    }
}

/// What a choice is written as: a word, or an object of its endpoint's form.
enum Written<T> {
    Word(String),
    Object(T),
}

impl<'de, T: Deserialize<'de>> Written<T> {
    /// Reading ends where a value begins that is neither. (An untagged enum of serde first holds the whole value, and a list of zeros
    /// takes many times its text.)
    fn read<D: Deserializer<'de>>(deserializer: D, wanted: &str) -> Result<Self, D::Error> {
        let read = deserializer.deserialize_any(WrittenVisitor(PhantomData));
        read.map_err(|_| D::Error::custom(format!("must be {wanted}")))
    }
}

struct WrittenVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for WrittenVisitor<T> {
    type Value = Written<T>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a word or an object")
    }
    fn visit_str<E>(self, word: &str) -> Result<Written<T>, E> {
        Ok(Written::Word(word.to_owned()))
    }
    fn visit_map<A: MapAccess<'de>>(self, entries: A) -> Result<Written<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(entries)).map(Written::Object)
    }
}

/// The functions of a request that has some, and may call them. They are as they were written until the prompt is made.
#[derive(Debug)]
pub struct GivenTools {
    choice: ToolChoice,
    functions: Arc<[GivenFunction]>,
}

/// What it takes to read the calls in an answer. It is kept until the answer ends.
#[derive(Clone, Debug)]
pub struct CallableTools {
    pub choice: ToolChoice,
    pub names: Arc<[String]>,
}

impl GivenTools {
    /// `None`: there is nothing to call.
    pub fn new(tools: Option<Tools>, choice: Option<ToolChoice>) -> Result<Option<Self>, ApiError> {
        let choice = choice.unwrap_or_default();
        let tools = tools.map_or(Vec::new(), |tools| tools.0);
        if tools.is_empty() {
            return match choice {
                ToolChoice::None | ToolChoice::Auto => Ok(None),
                _ => Err(ApiError::invalid(
                    "tool_choice",
                    "`tool_choice` needs `tools` to choose from.",
                )),
            };
        }
        let functions = tools.into_iter().enumerate();
        let functions = functions.map(|(at, tool)| GivenFunction::new(at, tool));
        let functions: Vec<GivenFunction> = functions.collect::<Result<_, _>>()?;
        if let ToolChoice::Named(name) = &choice
            && !functions.iter().any(|known| known.name == *name)
        {
            let message = format!("`tool_choice` names {:?}, which is not one of `tools`.", short(name));
            return Err(ApiError::invalid("tool_choice", message));
        }
        Ok(match choice {
            ToolChoice::None => None,
            choice => Some(Self {
                choice,
                functions: functions.into(),
            }),
        })
    }

    /// For a prompt, which shares them.
    pub fn functions(&self) -> Arc<[GivenFunction]> {
        self.functions.clone()
    }

    pub fn callable(&self) -> CallableTools {
        CallableTools {
            choice: self.choice.clone(),
            names: self.functions.iter().map(|function| function.name.clone()).collect(),
        }
    }

    /// What the whole output has to be where a call is forced: the arguments of the named function, or a list of calls.
    pub fn grammar(&self, is_parallel: bool) -> Option<OutputGrammar> {
        let schema = match &self.choice {
            ToolChoice::None | ToolChoice::Auto => return None,
            ToolChoice::Named(name) => {
                let mut functions = self.functions.iter();
                functions.find(|known| known.name == *name)?.compact_parameters()
            }
            ToolChoice::Required => {
                let calls: Vec<String> = self.functions.iter().map(GivenFunction::call_schema).collect();
                let most = if is_parallel { REQUIRED_CALLS_MAX } else { 1 };
                format!(
                    r#"{{"type":"array","minItems":1,"maxItems":{most},"items":{{"anyOf":[{}]}}}}"#,
                    calls.join(",")
                )
            }
        };
        Some(OutputGrammar::JsonSchema(schema.into()))
    }
}

/// A function as its client wrote it.
#[derive(Debug)]
pub struct GivenFunction {
    name: String,
    description: Option<String>,
    /// An object.
    parameters: Option<Schema>,
    /// Where in the tool they stand.
    parameters_field: &'static str,
}

impl GivenFunction {
    fn new(at: usize, tool: Tool) -> Result<Self, ApiError> {
        let wrong = |field: &str, what: &str| {
            let path = format!("tools[{at}].{field}");
            Err(ApiError::invalid(&path, format!("`{path}` {what}.")))
        };
        if tool.r#type.as_deref() != Some("function") {
            return wrong("type", "must be \"function\": this server knows no other tools");
        }
        let (function, [name_field, parameters_field]) = match tool.flat {
            Some(function) => (function, ["name", "parameters"]),
            None => (
                tool.function.unwrap_or_default(),
                ["function.name", "function.parameters"],
            ),
        };
        let name = function.name.unwrap_or_default();
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > TOOL_NAME_CHARS_MAX || !name.chars().all(is_name) {
            return wrong(
                name_field,
                "must have 1 to 64 letters, digits, underscores, points and dashes",
            );
        }
        // It is JSON, so its first character says what it is.
        let is_no_object = |schema: &Schema| !schema.get().starts_with('{');
        if function.parameters.as_ref().is_some_and(is_no_object) {
            return wrong(parameters_field, "must be a JSON schema");
        }
        Ok(Self {
            name,
            description: function.description,
            parameters: function.parameters,
            parameters_field,
        })
    }

    fn parameters(&self) -> &str {
        let written = self.parameters.as_ref().map(|schema| schema.get());
        // As a schema `{}` allows numbers and texts, too. Whoever writes it for a function means that it has no parameters.
        let has_fields = |text: &&str| !text.chars().all(|c| matches!(c, '{' | '}') || c.is_ascii_whitespace());
        written.filter(has_fields).unwrap_or(NO_PARAMETERS)
    }

    /// Of an object that calls it. No character of a name needs an escape.
    fn call_schema(&self) -> String {
        format!(
            r#"{{"type":"object","properties":{{"name":{{"const":"{}"}},"arguments":{}}},"required":["name","arguments"],"additionalProperties":false}}"#,
            self.name,
            self.compact_parameters()
        )
    }

    /// Without the client's white space and escapes, which are no part of a grammar. What is no object, or has too many values, stays
    /// as it is: the template's reader refuses it.
    fn compact_parameters(&self) -> String {
        let read = Trees::new(TOOL_VALUES_MAX).object(self.parameters());
        let compact = read.ok().flatten().map(|tree| tree.to_string());
        compact.unwrap_or_else(|| self.parameters().to_owned())
    }

    /// Of what a template prints as it is. The parameters are printed anew, and may become shorter.
    pub fn text_bytes(&self) -> usize {
        self.name.len() + self.description.as_ref().map_or(0, String::len)
    }

    pub fn work_bytes(&self) -> usize {
        self.text_bytes() + self.parameters().len()
    }

    /// As a template gets it. `at` is its place among the tools.
    pub fn for_template(&self, at: usize, trees: &mut Trees) -> Result<Value, ApiError> {
        let path = || format!("tools[{at}].{}", self.parameters_field);
        let parameters = trees.object(self.parameters());
        let parameters = parameters.map_err(|TooManyValues| too_many_values(&path()))?;
        let parameters = parameters.ok_or_else(|| {
            let path = path();
            // It is JSON, but deeper than any schema, or with a number beyond all doubles.
            ApiError::invalid(&path, format!("`{path}` must be a JSON schema."))
        })?;
        let mut function = json!({"name": self.name});
        if let Some(description) = &self.description {
            function["description"] = Value::from(description.as_str());
        }
        // `json!` would copy a value that it is given.
        function["parameters"] = parameters;
        let mut tool = json!({"type": "function"});
        tool["function"] = function;
        Ok(tool)
    }
}

/// `field` is where the values became too many.
pub fn too_many_values(field: &str) -> ApiError {
    let message = format!(
        "`{field}`: the `parameters` of all tools and the `arguments` of all calls have more than {TOOL_VALUES_MAX} JSON values \
         together. Leave some of the tools, or of the earlier calls, out."
    );
    ApiError::invalid(field, message)
}

/// A call in a message of the assistant.
#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `id` and `function`")]
pub struct MadeCall {
    id: Option<String>,
    function: Option<MadeFunction>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `name` and `arguments`")]
struct MadeFunction {
    name: Option<String>,
    arguments: Option<String>,
}

impl MadeCall {
    pub fn checked(self) -> Result<EarlierCall, &'static str> {
        let function = self.function.unwrap_or_default();
        Ok(EarlierCall {
            id: self.id,
            name: function.name.ok_or("needs `function.name`")?,
            arguments: function
                .arguments
                .ok_or("needs `function.arguments`, JSON in a string")?,
        })
    }
}

/// A call that the model made before, as its client wrote it.
#[derive(Debug)]
pub struct EarlierCall {
    pub id: Option<String>,
    pub name: String,
    /// JSON, unless the client or the model made a mistake.
    pub arguments: String,
}

impl EarlierCall {
    /// Of what a template prints as it is. The arguments are printed anew, and may become shorter.
    pub fn text_bytes(&self) -> usize {
        self.name.len()
    }

    pub fn work_bytes(&self) -> usize {
        self.text_bytes() + self.arguments.len()
    }

    /// As templates read it: with the arguments as an object, where they are one.
    pub fn for_template(self, trees: &mut Trees) -> Result<Value, TooManyValues> {
        let arguments = trees.object(&self.arguments)?;
        let mut call = json!({"id": self.id, "type": "function", "function": {"name": self.name}});
        // `json!` would copy a value that it is given.
        call["function"]["arguments"] = arguments.unwrap_or(Value::from(self.arguments));
        Ok(call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn white_space_and_escapes_of_a_client_are_no_part_of_a_grammar() {
        let tools = r#"[{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"\u0437": {"type": "string"}}}}}]"#;
        let grammar = |choice| {
            let tools = serde_json::from_str(tools).expect("tools");
            let given = GivenTools::new(Some(tools), Some(choice)).expect("tools");
            match given.expect("some").grammar(false) {
                Some(OutputGrammar::JsonSchema(schema)) => schema.to_string(),
                other => panic!("{other:?}"),
            }
        };
        let parameters = r#"{"type":"object","properties":{"з":{"type":"string"}}}"#;
        assert_eq!(grammar(ToolChoice::Named("f".to_owned())), parameters);
        assert!(grammar(ToolChoice::Required).contains(&format!(r#""arguments":{parameters}"#)));
    }

    #[test]
    fn a_function_with_an_empty_schema_is_called_with_an_object() {
        for parameters in ["{}", "{ \n}", "null"] {
            let tools = format!(r#"[{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}]"#);
            let tools = serde_json::from_str(&tools).expect("tools");
            let choice = Some(ToolChoice::Named("f".to_owned()));
            let given = GivenTools::new(Some(tools), choice).expect("tools").expect("some");
            let wanted = OutputGrammar::JsonSchema(NO_PARAMETERS.into());
            assert_eq!(given.grammar(true), Some(wanted), "{parameters}");
        }
    }

    #[test]
    fn what_is_no_choice_is_read_no_further_than_its_beginning() {
        let zeros = format!("[{}0]", "0,".repeat(1000));
        let mut left = zeros.as_bytes();
        assert!(serde_json::from_reader::<_, ToolChoice>(&mut left).is_err());
        assert!(left.len() > 1000, "{} bytes are left", left.len());
        let mut left = zeros.as_bytes();
        assert!(serde_json::from_reader::<_, FlatToolChoice>(&mut left).is_err());
        assert!(left.len() > 1000, "{} bytes are left", left.len());
    }

    #[test]
    fn a_choice_is_a_word_or_the_name_of_a_function() {
        let choice = |text: &str| serde_json::from_str::<ToolChoice>(text).ok();
        let flat = |text: &str| serde_json::from_str::<FlatToolChoice>(text).ok().map(|choice| choice.0);
        let named = || Some(ToolChoice::Named("f".to_owned()));
        assert_eq!(
            choice(r#"{"type": "function", "function": {"name": "f", "x": [0]}}"#),
            named()
        );
        assert_eq!(flat(r#"{"x": {}, "name": "f", "type": "function"}"#), named());
        assert_eq!(choice(r#""required""#), Some(ToolChoice::Required));
        assert_eq!(flat(r#""none""#), Some(ToolChoice::None));
        for wrong in ["5", "[]", "{}", r#""other""#, r#"{"type": "file_search", "name": "f"}"#] {
            assert_eq!((choice(wrong), flat(wrong)), (None, None), "{wrong}");
        }
    }
}
