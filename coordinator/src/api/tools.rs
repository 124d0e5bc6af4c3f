//! `tools` and `tool_choice`: which functions the model may call, and which it must.

use std::sync::Arc;

use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use serving_core::request::OutputGrammar;

use super::constraint::Schema;
use super::error::{ApiError, short};
use super::forms::{Given, List};
use super::limits::{TOOL_NAME_CHARS_MAX, TOOLS_MAX};

/// Calls that one answer may have when it must have some. A small model would go on until its budget is used up.
const REQUIRED_CALLS_MAX: usize = 4;

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
        #[serde(untagged)]
        enum Written {
            Word(String),
            Object { function: Named },
        }
        #[derive(Deserialize)]
        struct Named {
            name: String,
        }
        let wanted = "none, auto, required, or {\"type\": \"function\", \"function\": {\"name\": ..}}";
        let wrong = |_| serde::de::Error::custom(format!("must be {wanted}"));
        match Written::deserialize(deserializer).map_err(wrong)? {
            Written::Object { function } => Ok(Self::Named(function.name)),
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
        #[serde(untagged)]
        enum Written {
            Word(String),
            Object { r#type: String, name: String },
        }
        let wanted = "none, auto, required, or {\"type\": \"function\", \"name\": ..}";
        let wrong = || serde::de::Error::custom(format!("must be {wanted}"));
        match Written::deserialize(deserializer).map_err(|_| wrong())? {
            Written::Object { r#type, name } if r#type == "function" => Ok(Self(ToolChoice::Named(name))),
            Written::Object { .. } => Err(wrong()),
            Written::Word(word) => ToolChoice::of_word(word, wanted).map(Self),
        }
    }
}

/// The functions of a request that has some, and may call them.
#[derive(Clone, Debug, Default)]
pub struct GivenTools {
    /// As a template gets them.
    pub for_template: Vec<Value>,
    pub choice: ToolChoice,
    functions: Vec<(String, Value)>,
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
        let mut given = Self {
            choice,
            ..Self::default()
        };
        for (at, tool) in tools.into_iter().enumerate() {
            given.add(at, tool)?;
        }
        if let ToolChoice::Named(name) = &given.choice
            && !given.functions.iter().any(|(known, _)| known == name)
        {
            let message = format!("`tool_choice` names {:?}, which is not one of `tools`.", short(name));
            return Err(ApiError::invalid("tool_choice", message));
        }
        Ok(Some(given).filter(|given| given.choice != ToolChoice::None))
    }

    fn add(&mut self, at: usize, tool: Tool) -> Result<(), ApiError> {
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
        let parameters = function.parameters.map(|schema| serde_json::from_str(schema.get()));
        let parameters = match parameters.transpose() {
            Ok(None) => json!({"type": "object", "properties": {}}),
            Ok(Some(parameters @ Value::Object(_))) => parameters,
            _ => return wrong(parameters_field, "must be a JSON schema"),
        };
        let mut described = json!({"name": name});
        if let Some(description) = function.description {
            described["description"] = Value::from(description);
        }
        described["parameters"] = parameters.clone();
        self.for_template
            .push(json!({"type": "function", "function": described}));
        self.functions.push((name, parameters));
        Ok(())
    }

    pub fn names(&self) -> Arc<[String]> {
        self.functions.iter().map(|(name, _)| name.clone()).collect()
    }

    /// What the whole output has to be where a call is forced: the arguments of the named function, or a list of calls.
    pub fn grammar(&self, is_parallel: bool) -> Option<OutputGrammar> {
        let schema = match &self.choice {
            ToolChoice::None | ToolChoice::Auto => return None,
            ToolChoice::Named(name) => self.functions.iter().find(|(known, _)| known == name)?.1.clone(),
            ToolChoice::Required => {
                let calls = self.functions.iter().map(|(name, parameters)| {
                    json!({
                        "type": "object", "properties": {"name": {"const": name}, "arguments": parameters},
                        "required": ["name", "arguments"], "additionalProperties": false,
                    })
                });
                let most = if is_parallel { REQUIRED_CALLS_MAX } else { 1 };
                json!({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls.collect::<Vec<_>>()}})
            }
        };
        Some(OutputGrammar::JsonSchema(schema.to_string().into()))
    }
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
    pub fn new(id: Option<String>, name: Option<String>, arguments: Option<String>) -> Self {
        Self {
            id,
            function: Some(MadeFunction { name, arguments }),
        }
    }

    /// As templates read it: with the arguments as an object, where they are one.
    pub fn for_template(self) -> Result<Value, &'static str> {
        let function = self.function.unwrap_or_default();
        let name = function.name.ok_or("needs `function.name`")?;
        let text = function
            .arguments
            .ok_or("needs `function.arguments`, JSON in a string")?;
        let arguments = match serde_json::from_str(&text) {
            Ok(arguments @ Value::Object(_)) => arguments,
            _ => Value::from(text),
        };
        Ok(json!({"id": self.id, "type": "function", "function": {"name": name, "arguments": arguments}}))
    }
}
