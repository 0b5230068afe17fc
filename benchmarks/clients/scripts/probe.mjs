// The same as probe.py, for scripts of Node.
export const URL = process.env.MOONPOOL_URL;
export const MODEL = process.env.MOONPOOL_MODEL;
export const QUESTION = "What is the capital of France?";
const choices = (...values) => ({ type: "string", enum: values });
export const WEATHER_SCHEMA = {
  type: "object", properties: { city: choices("Paris", "Rome") },
  required: ["city"], additionalProperties: false,
};
export const CITY_SCHEMA = {
  type: "object", properties: { city: choices("Paris", "Rome"), size: choices("small", "large") },
  required: ["city", "size"], additionalProperties: false,
};

export async function run(tries) {
  for (const [feature, attempt] of Object.entries(tries)) {
    let remark = "", works = true;
    try { remark = (await attempt()) ?? ""; }
    catch (error) { remark = `${error.name}: ${error.message}`; works = false; }
    remark = remark.split(/\s+/).join(" ").slice(0, 300);
    console.log("RESULT " + JSON.stringify({ feature, works, remark }));
  }
}

export function check(condition, what) {
  if (!condition) throw new Error("unexpected answer: " + JSON.stringify(what)?.slice(0, 200));
}
